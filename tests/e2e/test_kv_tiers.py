"""`tidelane serve` as a process: KV in all tiers, disks that fail, and more work than there is room for."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from tools.kv_proof import pressure
from tools.kv_proof.serving import Room, Served, TieredEngine, free_port

from tidelane.engine.kv.disk_copier import MOST_FAILURES
from tidelane.engine.kv.rhythm import FEW_PAUSES

from .serving import serve_command, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK_BYTES = 737_280  # of 16 tokens of the built-in model


async def test_the_next_turn_of_a_conversation_finds_its_history(served: Served) -> None:
    await served.until_ready()
    turn = {"role": "user", "content": "Tell me of the tides. " * 20}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=300) as client:

        async def ask(messages: list[Any], **extra: str) -> tuple[str, int, int]:
            answer = await client.chat.completions.create(
                model="chat",
                messages=messages,
                max_tokens=40,
                temperature=0,
                extra_body={"ignore_eos": True, **extra},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached or 0

        first, prompt_tokens, cached = await ask([turn])
        assert cached == 0
        # Half a token may be the end of the first answer and the beginning of what is said next.
        history = [turn, {"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}]
        _, _, cached = await ask(history)
        assert cached >= prompt_tokens // 16 * 16
        assert (await ask([turn]))[::2] == (first, (prompt_tokens - 1) // 16 * 16)
        assert (await ask([turn], cache_salt="another"))[::2] == (first, 0)
    await served.until_idle()
    hits = await served.metric("prefix_cache_hits_total")
    assert hits >= 2 * (prompt_tokens // 16 * 16)


@pytest.mark.parametrize(
    ("held_as", "host_memory", "alike", "record_bytes"),
    [("auto", 128 << 20, 60, BLOCK_BYTES), ("int8", 34 << 20, 20, 30 * 6528)],  # of 30 layers
)
async def test_what_has_no_room_on_the_device_comes_back_from_host_memory(
    tmp_path: Path, held_as: str, host_memory: int, alike: int, record_bytes: int
) -> None:
    port = free_port()
    # Room for some 700 tokens on the device, and for four times that below.
    command = [*serve_command(port, tmp_path), "--kv-pool-memory", str(32 << 20)]
    command += ["--kv-host-memory", str(host_memory), "--kv-dtype", held_as]
    with subprocess.Popen(command) as process:
        try:
            engine = Served(process, port)
            await engine.until_ready()
            async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                prompts = [f"{name} " + "has much to tell of the sea. " * 50 for name in ("Ada", "Ben", "Cleo", "Dan")]
                first = [await text_of(client, prompt, 30) for prompt in prompts]
                await engine.until_idle()
                hits = await engine.metric("prefix_cache_hits_total")
                again = [await text_of(client, prompt, 30) for prompt in prompts]
                await engine.until_idle()
            # Summed in other batches, or rounded, so that a near-tie may flip late in a text.
            assert [text[:alike] for text in again] == [text[:alike] for text in first]
            assert await engine.metric("prefix_cache_hits_total") - hits > 4 * 300
            tier, loaded, loaded_bytes, loading_s, failed, evictions = await engine.metrics(
                'kv_tier_blocks{model_name="chat",state="idle",tier="host"}',
                'kv_moved_blocks_total{model_name="chat",tier="host",way="load"}',
                'kv_moved_bytes_total{model_name="chat",tier="host",way="load"}',
                'kv_moving_seconds_total{model_name="chat",tier="host",way="load"}',
                'kv_failed_moves_total{model_name="chat",tier="host",way="load"}',
                'kv_evictions_total{model_name="chat",tier="device"}',
            )
            assert tier > 60
            assert loaded > 60
            assert loaded_bytes == loaded * record_bytes
            assert 0 < loading_s < 60
            assert failed == 0
            assert evictions > 60
        finally:
            process.terminate()
            assert process.wait(60) == 0


async def test_an_engine_killed_and_started_again_finds_its_kv_on_disk(tmp_path: Path) -> None:
    port = free_port()
    folder = tmp_path / "kv"
    disk = ("--kv-disk-memory", str(256 << 20), "--kv-disk-folder", str(folder))
    command = [*serve_command(port, tmp_path), "--kv-host-memory", str(64 << 20), "--kv-idle-timeout", "600", *disk]
    prompts = [f"{name} " + "has much to tell of the sea. " * 50 for name in ("Ada", "Ben")]
    spilled = 'kv_moved_blocks_total{model_name="chat",tier="disk",way="store"}'
    texts = []
    for life in range(2):
        with subprocess.Popen(command) as process:
            engine = Served(process, port)
            try:
                await engine.until_ready()
                async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                    texts.append([await text_of(client, prompt, 30) for prompt in prompts])
                async with asyncio.timeout(60):
                    while await engine.metric(spilled) < (2 * 22 if life == 0 else 0):
                        await asyncio.sleep(0.1)  # the interval of a poll with a deadline
                hits = await engine.metric("prefix_cache_hits_total")
                fetched = await engine.metric('kv_moved_blocks_total{model_name="chat",tier="disk",way="load"}')
            finally:
                process.kill()
    assert [text[:60] for text in texts[0]] == [text[:60] for text in texts[1]]
    assert hits >= 2 * 320
    assert fetched >= 2 * 20


async def test_who_comes_in_a_rhythm_is_expected(tmp_path: Path) -> None:
    port, pause_s = free_port(), 4.0
    sizes = {"pool": ROOM.device_bytes, "host": ROOM.host_bytes, "disk": ROOM.disk_bytes}
    command = [*serve_command(port, tmp_path), "--kv-prefetch", "--kv-disk-folder", str(tmp_path / "kv")]
    command += [text for tier, size in sizes.items() for text in (f"--kv-{tier}-memory", str(size))]
    with subprocess.Popen(command) as process:
        engine = Served(process, port)
        try:
            await engine.until_ready()
            async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                for _ in range(FEW_PAUSES + 2):  # so that it is known how others pause
                    await text_of(client, "Once and again it is asked of the sea and of the tides, and that is all.", 1)
                texts = [await text_of(client, PROMPTS[0], 4)]
                for turn in range(5):
                    ended_s = time.monotonic()
                    for name in ("Eve", "Finn"):  # who crowd it out
                        await text_of(client, f"{name} {turn} " + "has much to tell of the sea. " * 50, 1)
                    if turn == 0:  # a slow machine takes longer to crowd it out
                        pause_s = max(pause_s, 2 * (time.monotonic() - ended_s))
                    # Its own rhythm, which is what is looked at: nothing waits for this.
                    await asyncio.sleep(ended_s + pause_s - time.monotonic())
                    texts.append(await text_of(client, PROMPTS[0], 4))
            await engine.until_idle()
            fetched, loaded = [
                await engine.metrics(
                    *(
                        f'kv_prefetch{name}_blocks_total{{model_name="chat",tier="{tier}"}}'
                        for name in ("ed", "ed_useful")
                    )
                )
                for tier in ("host", "device")
            ]
        finally:
            process.kill()
    assert len(set(texts)) == 1
    assert fetched[0] >= fetched[1] > 10
    assert loaded[0] >= loaded[1] > 10


# ---- disks that fail -------------------------------------------------------------------------------------------------

# Some 22 blocks each: device and host memory have room for one of them and a half, the disk for all.
PROMPTS = [f"{name} " + "has much to tell of the sea. " * 50 for name in ("Ada", "Ben", "Cleo")]
ROOM = Room(device_bytes=36 * BLOCK_BYTES, host_bytes=36 * BLOCK_BYTES, disk_bytes=256 << 20)


class DiskEngine(TieredEngine):
    """With room for one and a half of PROMPTS above the disk."""

    def __init__(
        self, folder: Path, *, kv: Path | None = None, launcher: Sequence[str] = (), wrapper: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, ROOM, kv=kv, launcher=launcher, wrapper=wrapper)

    async def texts(self, prompts: list[str]) -> list[str]:
        """The beginnings of the answers, asked for one after the other: late in a text a near-tie may flip."""
        async with openai.AsyncOpenAI(base_url=f"{self.served.url}/v1", api_key="none", timeout=120) as client:
            return [(await text_of(client, prompt, 30))[:60] for prompt in prompts]

    async def first_texts(self) -> list[str]:
        """The answers to PROMPTS; all KV of each is on the disk before the next is asked for."""
        texts = []
        for number, prompt in enumerate(PROMPTS, 1):
            texts += await self.texts([prompt])
            await self.until("moved_blocks", "store", 22 * number)
        await self.served.until_idle()
        return texts


async def test_a_folder_removed_and_then_a_disk_that_takes_no_more_leave_all_answers_right(tmp_path: Path) -> None:
    with DiskEngine(tmp_path) as engine:
        await engine.served.until_ready()
        texts = await engine.first_texts()
        shutil.rmtree(engine.kv)
        assert await engine.texts(PROMPTS[:1]) == texts[:1]
        assert await engine.moved("moved_blocks", "load") > 0, "an open file stays, whatever becomes of its name"
        # From now on the kernel refuses all that it would write beyond so much of any file.
        psutil.Process(engine.process.pid).rlimit(psutil.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        new = ["Nobody asked this before. " + PROMPTS[0]]
        answers = await engine.texts(new)
        await engine.until("failed_moves", "store", MOST_FAILURES)
        assert await engine.texts(new) == answers
        assert await engine.texts(PROMPTS) == texts
        assert engine.log().count("the disk has failed 3 times in a row, and is left alone from now on") == 1
        await engine.end()


async def test_a_disk_whose_reads_fail_is_done_without(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    faulty = str(Path(__file__).with_name("faulty_engine.py"))
    with DiskEngine(tmp_path, launcher=(faulty, str(failing))) as engine:
        await engine.served.until_ready()
        texts = await engine.first_texts()
        assert await engine.texts(PROMPTS[:1]) == texts[:1]
        assert await engine.moved("moved_blocks", "load") > 0
        failing.touch()
        loaded = await engine.moved("moved_blocks", "load")
        assert await engine.texts(PROMPTS) == texts
        assert await engine.moved("moved_blocks", "load") == loaded
        assert await engine.moved("failed_moves", "load") >= MOST_FAILURES
        assert engine.log().count("is left alone from now on") == 1
        assert "KV on disk: [Errno 5] Input/output error" in engine.log()
        await engine.end()


async def test_a_disk_that_hangs_holds_up_neither_answers_nor_the_end(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    faulty = str(Path(__file__).with_name("faulty_engine.py"))
    with DiskEngine(tmp_path, launcher=(faulty, str(failing))) as engine:
        await engine.served.until_ready()
        texts = await engine.first_texts()
        failing.write_text("hang")
        assert await engine.texts(PROMPTS[:1]) == texts[:1]
        await engine.end()
        assert "copies of KV have not ended within 5 s" in engine.log()


# A file system of its own for one process and its children, gone with them; needs no rights of anybody.
APART = ("unshare", "--map-root-user", "--mount", "sh", "-c")


def mounted(folder: Path, options: str) -> tuple[str, ...]:
    """What a command is put behind to see a file system in memory there, with the folder `kv` of it given."""
    if subprocess.run([*APART, f"mount -t tmpfs none {folder}"], capture_output=True, check=False).returncode:
        pytest.skip("here a process may not mount file systems, not even for itself alone")
    return (*APART, f'mount -t tmpfs -o {options} none {folder} && exec "$@"', "sh")


async def test_a_file_system_that_runs_full_takes_no_room_from_the_engine(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = ROOM.disk_bytes + (4 << 20)
    with DiskEngine(tmp_path, kv=disk / "kv", wrapper=mounted(disk, f"size={size}")) as engine:
        await engine.served.until_ready()
        there = Path(f"/proc/{engine.process.pid}/root{disk}")
        with (there / "other").open("wb", buffering=0) as other, suppress(OSError):
            for _ in range(64):
                other.write(bytes(1 << 20))
        assert shutil.disk_usage(there).free == 0
        texts = await engine.first_texts()
        assert await engine.texts(PROMPTS[:1]) == texts[:1]
        assert await engine.moved("moved_blocks", "load") > 0
        assert await engine.moved("failed_moves", "store") == 0
        await engine.end()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("size=16m", r"kv\.slots of \d+ bytes lacks \d+ bytes of disk: free them, or lower the capacity by as much"),
        ("ro", r"cannot keep KV in .*kv\.slots: Read-only file system; name a folder that can be written to"),
    ],
    ids=["full", "read-only"],
)
def test_a_file_system_that_cannot_hold_kv_ends_the_start_in_one_line(
    tmp_path: Path, options: str, reason: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with DiskEngine(tmp_path, kv=disk / "kv", wrapper=mounted(disk, options)) as engine:
        assert engine.process.wait(180) == 78
    (last_word,) = [line for line in engine.log().splitlines() if "cannot serve" in line]
    assert re.search(f"ERROR tidelane.engine.serve cannot serve: .*{reason}", last_word)
    assert "Traceback" not in engine.log()


# ---- more work than there is room for --------------------------------------------------------------------------------


async def test_64_clients_and_room_for_four_leave_no_block_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TieredEngine(tmp_path, pressure.ROOM) as engine:
        await engine.served.until_ready()
        pressed = await pressure.press(engine, 60.0, seed=0, tell=lambda *_: None)
        await engine.end()
    assert pressed.faults == ()
    assert pressed.answered > pressure.CLIENTS / 2
    assert pressed.left > 0
    with capsys.disabled():
        print(
            f"\n{pressed.answered} answered, {pressed.left} left, {pressed.preemptions} pre-empted; "
            f"median {pressed.median_s:.1f} s, slowest {pressed.slowest_s:.1f} s, "
            f"{pressed.slowest_over_median:.1f} times the median"
        )
