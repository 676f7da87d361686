"""The node agent: it runs engines on one node as an operator asks, and holds each to its objective.

Belongs here: which devices the node has and who holds them, starting, watching, draining and replacing engine
processes, remembering across its own restarts what it was asked to run, and the slow feedback from measured latency to
the bounds an engine may use. Does not belong here: anything that needs torch (an agent must start in a moment and keep
working when an engine's libraries are broken), Kubernetes, and which node runs what (the operator's).

A call's way through: `service` (gRPC) -> `node` (claims, state file) -> `replica` (one per replica: acts on what
`lifecycle` decides) -> `engine_process` (the child) and `control` (its socket).
"""
