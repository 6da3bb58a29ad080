#!/bin/sh
# The drills and the root-only tests need a few system programs. As root on Debian or Ubuntu they are installed;
# elsewhere this says what is missing and what is skipped for it. Never fails: everything else works without them.
set -u
missing=''
for pair in ip:iproute2 nsenter:util-linux losetup:mount mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs fusermount3:fuse3 sshfs:sshfs sftp-server:openssh-sftp-server sshd:openssh-server ssh:openssh-client git:git; do
  name=${pair%%:*}
  found=''
  for place in /usr/sbin /sbin /usr/lib/openssh /usr/libexec/openssh; do [ -x "$place/$name" ] && found=yes; done
  [ -n "$found" ] || command -v "$name" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing:$missing"
  # shellcheck disable=SC2086  a list of words
  apt-get update -qq >/dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null && missing=''
fi
[ -z "$missing" ] || echo "not installed:$missing. Skipped without them: power cuts of a real disk (the drill then kills processes only, and says so)"
[ "$(id -u)" = 0 ] || echo "not root. Skipped: power cuts of a real disk (the drill then kills processes only, and says so)"
exit 0
