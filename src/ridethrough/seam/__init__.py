"""The outside world, behind a few small doors: files, clock, processes, local sockets.

Everything that touches the operating system stands here, so that a test can put something
else in its place and cut the power between any two calls.
"""
