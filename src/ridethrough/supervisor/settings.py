"""What `ridethrough run` was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridethrough.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Command, wishes and configuration."""

    argv: tuple[str, ...]
    """Empty if a library started us: then nothing is started or restarted."""
    is_fresh: bool = False
    hang_s: float = 60.0
    grace_s: float = 30.0
    config: Config = field(default_factory=Config)

    @property
    def suspect_s(self) -> float:
        """Silence after which a node is suspected."""
        return self.config.peers.suspect_s

    @property
    def dead_s(self) -> float:
        """Silence after which a node is given up if no rank progresses."""
        return self.config.peers.dead_s
