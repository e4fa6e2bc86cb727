"""Data-parallel training: the ranks that `torchrun` starts, and what they tell each other.

    torchrun --nproc-per-node 2 -m sharpwave train ppo --env CartPole-v1

Each rank is a process with environments, random streams and experience of its own. This is the only module that knows
torch.distributed. A trainer talks to the others through its `World`; that of a process alone does nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import Tensor

from sharpwave.run.errors import RankFailed, UserError

TIMEOUT = timedelta(minutes=10)  # a rank that the others wait for longer is taken for dead
LOOK = 0.5  # seconds between two looks at whether a rank has failed
GRACE = 5  # seconds in which a rank that has failed, or has heard of it, may end by itself


class World:
    """A process alone: what several ranks would do together it does, or leaves, without a call to torch.distributed.

    Args:
        rank: whose random streams the process has.
    """

    size = 1
    """R, how many ranks train together."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def __init__(self, rank: int = 0):
        self.rank = rank

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files, prints and evaluates for all."""
        return self.rank == 0

    def sum_(self, x: Tensor) -> None:
        """Replace `x` by its sum over the ranks, the same bits on each. Fit for a captured graph."""

    def gather(self, x: Tensor) -> Tensor:
        """(R, *x.shape): every rank's `x`, in order. Fit for a captured graph."""
        return x[None]

    def take_first_(self, tensors: Iterable[Tensor]) -> None:
        """Replace float32 tensors by those of rank 0."""

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers. No GPU is waited for."""
        return number

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def tell(self, text: str) -> str:
        """The text of rank 0."""
        return text

    def require_same(self, text: str, what: str) -> None:
        """UserError unless `text` is rank 0's."""

    def close(self) -> None:
        """Leave the others, in order. Graphs with collectives in them must have been let go of."""


ALONE = World()


class Ranks(World):
    """One of several ranks, from here until `close`. CPU tensors go by gloo, CUDA ones by NCCL.

    A method raises RankFailed where another rank has ended, or does not come within TIMEOUT.
    """

    def __init__(self, rank: int, size: int, on_gpu: bool):
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        super().__init__(rank)
        self.size = size
        self._dist = dist
        try:
            store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
        except RuntimeError as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UserError(
                f"rank {rank} cannot reach the others at {place}, where torchrun says they meet: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
        self._news = dist.PrefixStore("sharpwave-news", store)
        self._is_over = threading.Event()
        with self._talking():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=dist.PrefixStore("sharpwave", store), rank=rank, world_size=size, timeout=TIMEOUT,
            )  # fmt: skip
        threading.Thread(target=self._watch, daemon=True).start()

    def sum_(self, x: Tensor) -> None:
        with self._talking():
            self._dist.all_reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        # A sum with zeros is exact, and unlike PyTorch's gathers the same call in every version and backend.
        every = x.new_zeros(self.size, *x.shape)
        every[self.rank] = x
        self.sum_(every)
        return every

    @torch.no_grad()
    def take_first_(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        flat = torch.cat([x.reshape(-1) for x in tensors])
        with self._talking():
            self._dist.broadcast(flat, 0)
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))

    def largest(self, number: int) -> int:
        shared = torch.tensor(number)
        with self._talking():
            self._dist.all_reduce(shared, self._dist.ReduceOp.MAX)
        return int(shared)

    def barrier(self) -> None:
        self.largest(0)

    def tell(self, text: str) -> str:
        content = bytearray(text.encode()) if self.is_first else bytearray(0)
        buffer = torch.zeros(self.largest(len(content)), dtype=torch.uint8)
        if content:
            buffer.copy_(torch.frombuffer(content, dtype=torch.uint8))
        with self._talking():
            self._dist.broadcast(buffer, 0)
        return bytes(buffer.tolist()).decode()

    def require_same(self, text: str, what: str) -> None:
        first = self.tell(text)
        if text != first:
            differ = [
                f"{a!r}, not {b!r}" for a, b in zip(text.splitlines(), first.splitlines(), strict=False) if a != b
            ]
            raise UserError(
                f"rank {self.rank} has other {what} than rank 0 ({'; '.join(differ) or 'of another number'}): start "
                "every rank with the same command, on machines of one kind"
            )

    def close(self) -> None:
        self._dist.destroy_process_group()
        self._is_over.set()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends. After GRACE it is ended, for what waits for them may never return."""
        self._is_over.set()
        if not isinstance(error, RankFailed):
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):  # the store has gone, with the process that held it
                self._news.compare_set("failed", "", f"rank {self.rank} failed: {' '.join(reason.split())}")
        if hasattr(signal, "alarm") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(GRACE)

    def _reason(self) -> str | None:
        """Which rank failed first, and why; None where no rank has said so."""
        try:
            return self._news.get("failed").decode() if self._news.check(["failed"]) else None
        except RuntimeError:
            return None

    @contextmanager
    def _talking(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            # The rank that failed says so first and ends then; one that was killed says nothing.
            reason = self._reason()
            if reason is None:
                reason = f"another rank has ended, or has not answered ({' '.join(str(error).split())[:200]})"
            raise RankFailed(f"rank {self.rank} stops: {reason}", self.is_first) from error

    def _watch(self) -> None:
        """End this process where another rank has failed and the main thread waits for a GPU that waits for it."""
        while not self._is_over.wait(LOOK):
            reason = self._reason()
            if reason is not None and not self._is_over.wait(GRACE):
                print(f"sharpwave: error: rank {self.rank} stops: {reason}", file=sys.stderr, flush=True)
                os._exit(1)


def launched() -> int:
    """How many ranks `torchrun` has started; 1 without it.

    Raises:
        UserError: the environment says so only in part.
    """
    told = {name: os.environ.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    if told["LOCAL_RANK"] is None:
        return 1
    strange = [name for name, number in told.items() if number is None or not number.isdecimal()]
    if strange:
        raise UserError(
            f"{strange[0]} is {told[strange[0]]!r} in the environment, where torchrun puts a number: unset LOCAL_RANK, "
            "or start with torchrun"
        )
    return int(told["WORLD_SIZE"] or 1)


@contextmanager
def joined(device: str) -> Generator[World]:
    """The ranks that `torchrun` has started, or ALONE; an error inside ends them all.

    Args:
        device: the run's --device. Under torchrun "cuda" is from here on the GPU of the rank's number on its machine.

    Raises:
        UserError: `device` names one GPU, there are more ranks than GPUs, or PyTorch cannot connect them.
    """
    if launched() == 1:
        yield ALONE
        return
    on_gpu = _take_gpu(device)
    world = Ranks(int(os.environ["RANK"]), launched(), on_gpu)
    try:
        yield world
    except BaseException as error:
        world.fail(error)
        raise


def _take_gpu(device: str) -> bool:
    """Make the rank's GPU the process's own, if `device` means GPUs; whether it does."""
    ranks, local = int(os.environ.get("LOCAL_WORLD_SIZE", launched())), int(os.environ["LOCAL_RANK"])
    kind = device.split(":", maxsplit=1)[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if ":" in device:
        raise UserError(
            f"--device {device} under torchrun: every rank takes the GPU of its own number, so give --device cuda, and "
            "choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {device} under torchrun: ranks train on CPUs or CUDA GPUs; use cpu, cuda or auto")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise UserError("this PyTorch is built without gloo, by which ranks talk: install another build of PyTorch")
    if kind == "cpu" or not torch.cuda.is_available():  # which the settings' own check reports
        return False
    if not torch.distributed.is_nccl_available():
        raise UserError(
            "this PyTorch is built without NCCL, by which GPUs talk: install another build, or --device cpu"
        )
    count = torch.cuda.device_count()
    if ranks > count:
        raise UserError(
            f"torchrun started {ranks} ranks on this machine, which has {count} GPU{'s' * (count != 1)}: use "
            f"--nproc-per-node {count}, or --device cpu"
        )
    torch.cuda.set_device(local)
    return True
