"""Return codes of Mooncake's client with a specific meaning. Other negative codes are failed
transfers and unreachable masters."""

OK, NO_SPACE, NOT_FOUND, NOT_READY, HAS_LEASE, RPC_FAILED = 0, -200, -704, -703, -706, -900
