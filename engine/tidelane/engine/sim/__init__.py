"""The same scheduling in virtual time: replaces the executor, the clock and the desk, and nothing else. No torch."""
