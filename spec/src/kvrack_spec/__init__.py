"""kvrack-spec: the conformance suite of kvrack cache backends. Importing it imports no torch."""

SPEC_VERSION = "1.0"
"""Version of SPEC.md, the rules this distribution proves."""

__all__ = ["SPEC_VERSION"]
