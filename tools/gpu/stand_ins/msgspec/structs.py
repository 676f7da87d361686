from dataclasses import replace

__all__ = ["replace"]
