"""The checks, pytest tests grouped a file a topic. Each cites the rules of SPEC.md that it proves."""
