"""So that the engine's messages can be imported where ZeroMQ is not installed; nothing here sends any."""
