"""The operator: turns InferenceServices into running replicas, Services and status.

Belongs here: the resource and its validation, the one pure `plan`, and the thin code that observes and acts, in a
cluster or without one. `handlers` is the only module that imports kopf. Does not belong here: anything that needs torch
or a GPU; what runs on a node (the agent); serving (the engine).
"""
