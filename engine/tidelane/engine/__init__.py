"""The serving engine: requests in, tokens out, each phase in its lane."""
