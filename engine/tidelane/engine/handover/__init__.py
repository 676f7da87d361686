"""Prefill and decode in two processes: what they say to each other, how KV gets across, and who may write where.

The decode side owns the loop and the blocks; the prefill side is its child and owns nothing that must outlive it. The
pools of both have the same blocks: a prompt's KV is computed in the prefill side's and copied to the same blocks of the
decode side's. A slice is a lease on the blocks of its prompts, which ends with its completion or with the death of the
process that has it (docs/adr/0021-disaggregated-is-a-child-process.md).
"""
