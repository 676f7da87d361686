"""The router: one HTTP address before the replicas of one or more services.

Here belongs what chooses a replica for each request, passes the request on and the answer back, and tries another
replica where that is safe. It knows replicas by what they tell of themselves and by what it sent there. Nothing that it
holds matters to anyone else: several routers stand beside each other and never speak. No torch, no tokenizer, no
Kubernetes.
"""
