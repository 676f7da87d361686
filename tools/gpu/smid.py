"""On which SMs a stream's kernels run: asked of the hardware. Apart from the rest, since Triton reads its source."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# Many more blocks than SMs, each long enough for all SMs to get some.
BLOCKS = 8192
TURNS = 2000


def sms_of(stream: torch.cuda.Stream, device: torch.device) -> set[int]:
    found = torch.full((BLOCKS,), -1, dtype=torch.int32, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _note_sm[(BLOCKS,)](found, TURNS, num_warps=1)
    stream.synchronize()
    return set(found.tolist())


@triton.jit
def _note_sm(found, turns):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [block], dtype=tl.int32, is_pure=False, pack=1)
    spent = 0.0
    for turn in range(turns):
        spent += tl.sqrt(turn * 1.0)
    # `spent` is never negative, but the compiler cannot know, and must go through the turns.
    tl.store(found + block, tl.where(spent < 0.0, -2, number))
