"""What a service with a thousand tasks holds: ResNet-18 at 30%, client and server on this machine, over HTTP.

    python3 dev.py bench-serving               # some twenty minutes
    python3 dev.py bench-serving --quick       # a few, to see that it runs

A few networks lose 70% of their channels, and a thousand task files are made of them, each with values of its own. Four
servers with the same HTTP, batching and threads differ in how they come to a task's network, and take turns:

- spalier: task files on one base, networks in a cache of so many bytes;
- peft: the unpruned base with LoRAs of the same rank, all in memory, switched by ``set_adapter``; eight of them,
  which tasks share, since a server with a thousand takes many minutes to come up;
- files: a whole fine-tuned network for each task, loaded from a file of its own for each batch;
- small files: the same pruned networks as spalier's, from files of their own, in a cache of as many bytes.

`frameworks` compares FastAPI with uvicorn, as here, with LitServe, which is not among the pinned versions: one network,
one input at a time, the same batches.

Requests are small JPEG files, spread over the tasks uniformly or by Zipf's law (exponent 1). What else the machine does
disturbs all of them alike: ratios count, and requests for a second of the server's processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import torch
import torchvision_ops
from safetensors.torch import load_file, save_file
from torch import nn

import spalier as sp
from spalier.networks import open_network
from spalier.serve import Limits
from spalier.serve.service import Service
from spalier.tasks.switcher import ReadyNetwork
from spalier.timing import describe_machine

torchvision_ops.declare()  # peft looks for torchvision as it is imported
RESULTS = Path(__file__).parent / "results" / "serving.json"
SIZE, DENSITY, RANK, LEARNED = 64, 0.3, 8, 4
QUEUE, ADAPTERS = 64, 8
CONTENDERS = ("spalier", "peft", "files", "small files")
PREPROCESSING = {"size": SIZE, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


# the tasks


def base() -> nn.Module:
    return open_network("resnet18", classes=100)


def learned(seed: int) -> sp.Task:
    """A task that keeps its own channels, and whose adapters have values as after training."""
    torch.manual_seed(seed)
    net = base()
    sp.attach_(net, sp.SPLoRA(rank=RANK), head="fc", example=torch.zeros(2, 3, SIZE, SIZE))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    structure = sp.trace(base(), torch.zeros(2, 3, SIZE, SIZE))
    keep = {s.name: torch.randperm(s.size)[: max(1, int(s.size * DENSITY))].tolist() for s in structure.streams}
    sp.prune_(net, sp.Plan(structure, keep))
    return sp.Task.of(net, f"learned{seed}", preprocessing=PREPROCESSING)


def make_store(folder: Path, count: int) -> list[str]:
    """So many tasks, each with numbers of its own, and the networks of the learned ones in files."""
    kinds, net = [learned(seed) for seed in range(LEARNED)], base()
    store, names = sp.Store(folder / "tasks"), [f"task{number:04}" for number in range(count)]
    for kind, task in enumerate(kinds):
        torch.save(task.build(net), folder / f"network{kind}.pt")
        save_file(net.state_dict(), folder / f"network{kind}.safetensors")
    for number, name in enumerate(names):
        torch.manual_seed(number)
        task = kinds[number % LEARNED]
        values = task.values + 0.001 * task.values.abs() * torch.randn_like(task.values)
        replace(task, info=replace(task.info, name=name), values=values).save(store.path(name))
        # a copy of its own for each would have gigabytes; a link gives this rival the disk's cache as a present
        for ending in ("pt", "safetensors"):
            (folder / f"{name}.{ending}").symlink_to(folder / f"network{number % LEARNED}.{ending}")
    return names


# the servers


class FileSwitcher:
    """Networks from files of their own, the ones used last kept under a limit of bytes."""

    def __init__(self, folder: Path, limit: int, *, whole: bool) -> None:
        self.store, self.folder, self.limit, self.whole = sp.Store(folder / "tasks"), folder, limit, whole
        self.info = self.store.load("task0000").info
        self._ready: OrderedDict[str, ReadyNetwork] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def ready(self) -> list[str]:
        return list(self._ready)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._ready.values())

    def look(self, name: str) -> ReadyNetwork | None:
        with self._lock:
            found = self._ready.pop(name, None)
            if found is not None:
                self._ready[name] = found
            return found

    def fetch(self, name: str) -> ReadyNetwork:
        if self.whole:
            with torch.device("meta"):
                net = sp.models.resnet18(classes=100)
            net.load_state_dict(load_file(self.folder / f"{name}.safetensors"), assign=True)
            net.eval()
        else:
            net = torch.load(self.folder / f"{name}.pt", weights_only=False)
        size = sum(p.nbytes for p in net.parameters())
        made = ReadyNetwork(name, net, self.info, size, (0, 0, 0))
        with self._lock:
            if size <= self.limit:
                self._ready[name] = made
            while self.bytes > self.limit:
                self._ready.popitem(last=False)
        return made


class PeftSwitcher:
    """One network, all adapters in it; the active one is switched, so one request runs at a time."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        from peft import LoraConfig, get_peft_model

        self.store, self.ready, self.bytes = sp.Store(folder / "tasks"), list(names), 0
        adapters = names[:ADAPTERS]
        info = self.store.load("task0000").info
        layers = [n for n, m in base().named_modules() if isinstance(m, nn.Conv2d)]
        config = LoraConfig(r=RANK, target_modules=layers, init_lora_weights=False)
        self.net = get_peft_model(base(), config, adapter_name=adapters[0])
        for name in adapters[1:]:
            self.net.add_adapter(name, config)
        self.net.eval()
        self._lock = threading.Lock()
        self._entries = {
            name: ReadyNetwork(name, _Switched(self, adapters[place % len(adapters)]), info, 0, (0, 0, 0))
            for place, name in enumerate(names)
        }

    def look(self, name: str) -> ReadyNetwork | None:
        return self._entries[name]

    fetch = look

    def run(self, name: str, batch: Any) -> Any:
        with self._lock:
            self.net.set_adapter(name)
            return self.net(batch)


class _Switched(nn.Module):
    def __init__(self, switcher: PeftSwitcher, name: str) -> None:
        super().__init__()
        self.__dict__["forward"] = lambda batch: switcher.run(name, batch)


def run_server(contender: str, folder: Path, cache: int, port: int, threads: int) -> None:
    import gc

    import uvicorn

    from spalier.serve.web import make_app

    torch.set_num_threads(1)
    if contender == "litserve":
        import litserve_peer

        litserve_peer.run(folder, port)
        return
    limits = Limits(cache=cache, queue=QUEUE, threads=threads)
    service = Service(base(), folder / "tasks", limits=limits)
    names = list(service.switcher.store)
    if contender == "peft":
        service.switcher = PeftSwitcher(folder, names)  # type: ignore[assignment]
    elif contender != "spalier":
        whole = contender == "files"
        service.switcher = FileSwitcher(folder, 0 if whole else cache, whole=whole)  # type: ignore[assignment]
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(make_app(service), host="127.0.0.1", port=port, log_config=None, access_log=False)
    uvicorn.Server(config).run()


class Server:
    """A server process, as long as the context lasts."""

    def __init__(self, contender: str, folder: Path, cache: int, port: int, threads: int = 2) -> None:
        self.contender, self.port = contender, port
        options = ["--serve", contender, "--folder", str(folder), "--cache", str(cache), "--port", str(port)]
        command = [sys.executable, __file__, *options, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Server:
        for _ in range(3000):
            path = "health" if self.contender == "litserve" else "healthz"
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5):
                    return self
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server of {self.contender} has ended") from None
                time.sleep(0.1)
        raise RuntimeError(f"the server of {self.contender} never answered")

    def __exit__(self, *given: object) -> None:
        self.process.terminate()
        self.process.wait(30)

    def processor_seconds(self) -> float:
        """Of the process and of those that it has started."""
        total, left = 0, [self.process.pid]
        while left:
            pid = left.pop()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
            for thread in Path(f"/proc/{pid}/task").iterdir():
                left += map(int, (thread / "children").read_text().split())
        return total / os.sysconf("SC_CLK_TCK")

    def resident(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])

    def builds(self) -> float:
        if self.contender == "litserve":
            return 0.0
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith("spalier_build_seconds_count")).split()[1])


# the clients


def zipf(names: list[str]) -> list[float]:
    return [1 / (rank + 1) for rank in range(len(names))]


def jpeg(seed: int = 0) -> bytes:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((SIZE, SIZE)).save(out, "JPEG")
    return out.getvalue()


@dataclass
class Seen:
    """What clients saw."""

    seconds: float
    latencies: list[float]
    statuses: Counter[int]

    def row(self) -> dict[str, Any]:
        ordered = sorted(self.latencies) or [math.nan]
        at = {"median_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
        found: dict[str, Any] = {
            key: 1000 * ordered[min(int(q * len(ordered)), len(ordered) - 1)] for key, q in at.items()
        }
        found |= {"requests": len(self.latencies), "requests_a_second": len(self.latencies) / self.seconds}
        return found | {"statuses": {str(status): count for status, count in self.statuses.items()}}


async def _client(
    connection: Any, draw: Any, seen: Seen, end: float, most: list[int], body: bytes, pause: float
) -> None:
    reader, writer = connection
    if pause:  # not all at once
        await asyncio.sleep(pause * random.random())
    kind = "application/json" if body.startswith(b"{") else "image/jpeg"
    while time.perf_counter() < end and most[0] > 0:
        most[0] -= 1
        path = f"/v1/tasks/{draw()}/predict"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        start = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        status = int(answer[9:12])
        seen.statuses[status] += 1
        if status == 200:
            seen.latencies.append(time.perf_counter() - start)
        if pause:
            await asyncio.sleep(max(0.0, start + pause - time.perf_counter()))
    writer.close()


def ask(
    port: int,
    names: list[str],
    law: str,
    clients: int,
    seconds: float,
    seed: int,
    most: int = 10**9,
    body: bytes | None = None,
    pause: float = 0.0,
) -> Seen:
    """Let so many clients ask, each one request after the other, for a time or a number of requests.

    With a pause each asks once in so many seconds.
    """
    weights = zipf(names) if law == "zipf" else None
    generator = random.Random(seed)
    draw = iter(lambda: generator.choices(names, weights)[0], None).__next__
    if len(names) > 1:  # drawn before, so that the clients cost little
        draw = iter(generator.choices(names, weights, k=100_000) * 20).__next__
    seen, sent, left = Seen(0.0, [], Counter()), body or jpeg(), [most]

    async def all_of_them() -> None:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]
        start = time.perf_counter()
        ends = start + seconds
        await asyncio.gather(*(_client(each, draw, seen, ends, left, sent, pause) for each in connections))
        seen.seconds = time.perf_counter() - start

    asyncio.run(all_of_them())
    return seen


def measured(
    server: Server, names: list[str], law: str, clients: int, seconds: float, seed: int, body: bytes | None = None
) -> dict[str, Any]:
    before, builds = server.processor_seconds(), server.builds()
    seen = ask(server.port, names, law, clients, seconds, seed, body=body)
    spent, made = server.processor_seconds() - before, server.builds() - builds
    row = {"contender": server.contender, "law": law, "clients": clients, **seen.row()}
    count = max(len(seen.latencies), 1)
    more = {"requests_a_processor_second": count / max(spent, 0.01), "cold": made / count}
    return {**row, **more, "resident": server.resident()}


# what is measured


def against(folder: Path, names: list[str], cache: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """All contenders in turns, by Zipf's law."""
    servers = [Server(name, folder, cache, 8700 + place) for place, name in enumerate(CONTENDERS)]
    rows = []
    try:
        for server in servers:
            server.__enter__()
            for name in names[: max(1, cache // 4_100_000) if server.contender in ("spalier", "small files") else 1]:
                ask(server.port, [name], "uniform", 1, 60, 0, most=1)
        for turn in range(rounds):
            for clients in (1, 16):
                rows += [measured(server, names, "zipf", clients, seconds, turn) for server in servers]
                print(rows[-4:], flush=True)
    finally:
        for server in servers:
            server.__exit__()
    return rows


def frameworks(folder: Path, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """One task, in turns: what the layers around the network cost."""
    rows = []
    body = json.dumps({"image": base64.b64encode(jpeg()).decode()}).encode()  # LitServe takes no plain files
    names = ["task0000"]
    with Server("spalier", folder, 10**9, 8720, threads=1) as own, Server("litserve", folder, 0, 8721) as other:
        for server in (own, other):
            ask(server.port, names, "uniform", 4, 3, 0, body=body)
        for turn in range(rounds):
            for clients in (1, 16):
                rows += [measured(server, names, "uniform", clients, seconds, turn, body) for server in (own, other)]
                print(rows[-2:], flush=True)
    return rows


def curve(folder: Path, names: list[str], whole: int, seconds: float, clients: tuple[int, ...]) -> list[dict[str, Any]]:
    """The cache from all tasks down to a hundredth of them."""
    rows = []
    for share in (1.0, 0.5, 0.25, 0.1, 0.03, 0.01):
        with Server("spalier", folder, int(whole * share * 1.01), 8710) as server:
            order = list(names)
            random.Random(0).shuffle(order)
            kept = names[: max(1, int(share * len(names)))]  # the ones that Zipf's law asks for most
            for name in reversed(kept):
                ask(server.port, [name], "uniform", 1, 60, 0, most=1)
            for law in ("uniform", "zipf"):
                for count in clients if share == 1 else (8,):
                    rows.append({"cache": share, **measured(server, names, law, count, seconds, 7)})
                    print(rows[-1], flush=True)
    return rows


def overload(folder: Path, names: list[str], whole: int, seconds: float, times: float) -> dict[str, Any]:
    """Before, under and after so many times what the service holds, from many more clients than there are places.

    0 times: clients that never wait.
    """
    with Server("spalier", folder, whole // 10, 8711) as server:
        ask(server.port, names, "zipf", 8, 5, 1)
        before = ask(server.port, names, "zipf", 8, 5, 2).row()
        pause = 12 * QUEUE / (times * before["requests_a_second"]) if times else 0.0
        flood = ask(server.port, names, "zipf", 12 * QUEUE, seconds, 3, pause=pause)
        after = [ask(server.port, names, "zipf", 8, 1, 4 + turn).row() for turn in range(4)]
        offered = sum(flood.statuses.values()) / flood.seconds
        found = {"before": before, "flood": flood.row(), "after_each_second": after, "resident": server.resident()}
        return found | {"offered_a_second": offered, "times_capacity": offered / before["requests_a_second"]}


def memory(folder: Path, names: list[str], whole: int, count: int, seconds: float) -> dict[str, Any]:
    """Resident memory over so many requests, with a cache that drops networks all the while."""
    with Server("spalier", folder, whole // 20, 8712) as server:
        found, done, end = [], 0, time.perf_counter() + seconds
        while done < count and time.perf_counter() < end:
            seen = ask(server.port, names, "zipf", 16, end - time.perf_counter(), done, most=count // 10)
            done += len(seen.latencies)
            found.append({"requests": done, "resident": server.resident(), "cold": server.builds() / done})
            print(found[-1], flush=True)
        return {"requests": done, "parts": found, "growth": found[-1]["resident"] / found[0]["resident"] - 1}


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By contender and clients, over the turns."""
    found: dict[str, dict[str, float]] = {}
    for contender in CONTENDERS:
        for clients in sorted({row["clients"] for row in rows}):
            mine = [row for row in rows if (row["contender"], row["clients"]) == (contender, clients)]
            keys = (
                "requests_a_second",
                "requests_a_processor_second",
                "median_ms",
                "p95_ms",
                "p99_ms",
                "cold",
                "resident",
            )
            found[f"{contender}, {clients}"] = {key: statistics.median(row[key] for row in mine) for key in keys}
    return found


def markdown(report: dict[str, Any]) -> str:
    """The table of docs/serving.md."""
    lines = [
        "| | clients | requests/s | per processor second | median ms | p99 ms | cold | resident MB |",
        "|" + "---|" * 8,
    ]
    for name, row in report["against"]["medians"].items():
        contender, _, clients = name.partition(", ")
        rates = f"{row['requests_a_second']:.0f} | {row['requests_a_processor_second']:.0f}"
        times = f"{row['median_ms']:.0f} | {row['p99_ms']:.0f}"
        lines.append(
            f"| {contender} | {clients} | {rates} | {times} | {row['cold']:.0%} | {row['resident'] / 1e6:.0f} |"
        )
    lines += [
        "",
        "| cache | law | clients | requests/s | median ms | p95 ms | p99 ms | cold | resident MB |",
        "|" + "---|" * 9,
    ]
    for row in report["curve"]:
        times = " | ".join(f"{row[key]:.0f}" for key in ("median_ms", "p95_ms", "p99_ms"))
        rates = f"{row['law']} | {row['clients']} | {row['requests_a_second']:.0f}"
        lines.append(f"| {row['cache']:.0%} | {rates} | {times} | {row['cold']:.0%} | {row['resident'] / 1e6:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", default="against,curve,overload,memory")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.1, help="of all networks, that the cache of `against` holds")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--overload-times", type=float, default=10.0, help="of what it holds; 0: clients never wait")
    parser.add_argument("--memory-requests", type=int, default=100_000)
    parser.add_argument("--memory-seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    for name in ("--serve", "--folder"):
        parser.add_argument(name)
    for name in ("--cache", "--port", "--threads"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    if given.serve:
        run_server(given.serve, Path(given.folder), given.cache, given.port, given.threads)
        return
    if given.quick:
        given.tasks, given.rounds, given.seconds = 40, 1, 1.0
        given.overload_seconds, given.memory_requests, given.memory_seconds = 3.0, 500, 60.0
    report = json.loads(given.out.read_text()) if given.out.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names = make_store(folder, given.tasks)
        switcher = sp.Switcher(base(), folder / "tasks")
        switcher.network(names[0])
        whole, size = switcher.bytes * len(names), (folder / "tasks" / f"{names[0]}.task.safetensors").stat().st_size
        about = {"tasks": len(names), "image": SIZE, "density": DENSITY, "rank": RANK, "queue": QUEUE, "threads": 2}
        about |= {"network_bytes": switcher.bytes, "task_file_bytes": size}
        report |= {"machine": describe_machine(torch.device("cpu"), 1), "settings": about}
        print(about, flush=True)
        parts = given.parts.split(",")
        if "frameworks" in parts:
            report["frameworks"] = frameworks(folder, given.seconds, given.rounds)
        if "against" in parts:
            rows = against(folder, names, int(whole * given.share), given.rounds, given.seconds)
            report["against" if given.share == 0.1 else f"against at {given.share:.0%}"] = {
                "seconds": given.seconds,
                "rounds": given.rounds,
                "medians": medians(rows),
                "rows": rows,
            }
        if "curve" in parts:
            counts = (1, 8) if given.quick else (1, 16, 64)
            report["curve"] = curve(folder, names, whole, given.seconds, counts)
        if "overload" in parts:
            found = overload(folder, names, whole, given.overload_seconds, given.overload_times)
            report["overload" if given.overload_times else "overload, clients that never wait"] = found
        if "memory" in parts:
            report["memory"] = memory(folder, names, whole, given.memory_requests, given.memory_seconds)
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    if "against" in report and "curve" in report:
        print(markdown(report))


if __name__ == "__main__":
    main()
