"""Settings that suit a known environment, by (algorithm, environment): what differs from the defaults, and why."""

from typing import Any

PRESETS: dict[tuple[str, str], dict[str, Any]] = {}
