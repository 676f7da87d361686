"""Measuring: a load generator for any OpenAI-compatible server, reports, the engine's own ratios and the demo.

The load generator and the reports need no torch; `in_process` and `engine_*` run the real loop and do.
"""
