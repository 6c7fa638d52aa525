"""The grader: texts in, verdicts out, from any thread and any event loop."""

import asyncio
import atexit
import os
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from maieutic.errors import GraderError, ProblemDataError
from maieutic.grading.equivalence import check_gold, decide_plain
from maieutic.grading.extraction import extract_answer
from maieutic.grading.plain import MAX_ANSWER_CHARS
from maieutic.grading.process import WorkerFault, WorkerProcess

DEFAULT_CHECK = "maieutic.grading.equivalence:equivalent"
_WARM = ["math_verify"]
_START_LIMIT_S = 120.0

Verdict = Literal["right", "wrong", "no_answer", "error"]


@dataclass(frozen=True)
class Grade:
    """What became of one text.

    `right` and `wrong` are about the answer; `no_answer` means that the text states none. `error` is about the
    grader (time limit, crash, unusable gold answer): it is never a wrong answer, and must be counted apart.
    """

    verdict: Verdict
    extracted: str | None
    detail: str | None = None


@dataclass
class _Item:
    answer: str
    gold: str
    waiters: list[Future[Grade]] = field(default_factory=list)


class Grader:
    """Grades texts against a gold answer; whatever needs algebra runs in worker processes that can be killed.

    Plain answers (numbers, units, percentages, choices, words) are decided in the calling thread; they are the
    great majority. The rest goes through one queue to `n_workers` processes, started when first needed. An item
    over its limit costs its worker its life and gets the verdict `error`; the queue goes on with a fresh worker.
    Equal questions in flight are asked once, and verdicts (not errors) are cached.

    Close it, or use it as a context manager; what is still open is closed when the interpreter exits.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        n_workers: int | None = None,
        cache_size: int = 65536,
        check: str = DEFAULT_CHECK,
        fast_path: bool = True,
    ) -> None:
        """No process is started yet.

        Args:
            timeout_s: wall-clock limit of one check in a worker, in seconds; waiting in the queue is not counted.
            n_workers: processes at most; default: one a CPU, at most 4.
            cache_size: verdicts kept, least recently used first out; 0 keeps none.
            check: import path `module:function` of `(answer, gold) -> bool` that the workers run.
            fast_path: decide plain answers in the calling thread. Off only to test the workers.

        Raises:
            GraderError: an argument is out of range.
        """
        if timeout_s <= 0:
            raise GraderError(f"timeout_s must be above 0 seconds, not {timeout_s}.")
        if n_workers is not None and n_workers < 1:
            raise GraderError(f"n_workers must be at least 1, not {n_workers}.")
        if cache_size < 0:
            raise GraderError(f"cache_size must be 0 or more, not {cache_size}.")
        if ":" not in check:
            raise GraderError(f"check must be an import path module:function, not {check!r}.")
        self.timeout_s = timeout_s
        self.n_workers = n_workers or min(4, os.cpu_count() or 1)
        self._cache_size = cache_size
        self._check = check
        self._fast_path = fast_path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._in_flight: dict[tuple[str, str], _Item] = {}
        self._cache: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._workers: set[WorkerProcess] = set()
        _open_graders.add(self)

    # -- the public calls ------------------------------------------------------------------------------------

    async def grade(self, text: str, gold: str) -> Grade:
        """Grade one text. Raises GraderError if the grader is closed or its check cannot be imported."""
        outcome = self._submit(text, gold)
        return outcome if isinstance(outcome, Grade) else await asyncio.wrap_future(outcome)

    async def grade_many(self, texts: Sequence[str], gold: str) -> list[Grade]:
        """Grade the samples of one post-test, in their order."""
        return list(await asyncio.gather(*(self.grade(text, gold) for text in texts)))

    def grade_sync(self, text: str, gold: str) -> Grade:
        """Grade one text and block until it is done; inside an event loop use `grade`."""
        outcome = self._submit(text, gold)
        return outcome if isinstance(outcome, Grade) else outcome.result()

    def close(self) -> None:
        """Kill the workers, fail what still waits with GraderError, and wait until all is reaped. Idempotent."""
        if os.getpid() != self._pid:
            return  # a forked copy: the processes are the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers, threads, items = list(self._workers), list(self._threads), list(self._in_flight.values())
            self._in_flight.clear()
        for worker in workers:
            worker.kill()
        for item in items:
            self._resolve(item, GraderError("The grader was closed while an answer waited for its verdict."))
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        _open_graders.discard(self)

    def __enter__(self) -> "Grader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- from the caller to the queue --------------------------------------------------------------------------

    def _submit(self, text: str, gold: str) -> "Grade | Future[Grade]":
        if self._closed:
            raise GraderError("The grader is closed: make a new one.")
        if os.getpid() != self._pid:
            raise GraderError("A grader cannot be used in a forked process: make a new one there.")
        answer = extract_answer(text)
        try:
            check_gold(gold)
            if answer is None:
                return Grade("no_answer", None)
            if len(answer) > MAX_ANSWER_CHARS:
                return Grade("wrong", answer, f"longer than {MAX_ANSWER_CHARS} characters: no final answer")
            if self._fast_path and (equal := decide_plain(answer, gold)) is not None:
                return Grade("right" if equal else "wrong", answer)
        except ProblemDataError as e:
            return Grade("error", answer, str(e))
        key = (answer, gold)
        waiter: Future[Grade] = Future()
        with self._lock:
            if self._closed:
                raise GraderError("The grader is closed: make a new one.")
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return Grade("right" if known else "wrong", answer)
            if (item := self._in_flight.get(key)) is not None:
                item.waiters.append(waiter)
                return waiter
            item = self._in_flight[key] = _Item(answer, gold, [waiter])
            if len(self._threads) < min(self.n_workers, len(self._in_flight)):
                # A daemon: a hung grader must not keep the interpreter from its exit handlers, which close it.
                thread = threading.Thread(target=self._serve, name="grader", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.put(item)
        return waiter

    def _finish(self, item: _Item, outcome: Grade | GraderError) -> None:
        key = (item.answer, item.gold)
        with self._lock:
            if self._in_flight.get(key) is not item:
                return  # close() has answered for it
            del self._in_flight[key]
            # Errors are not cached: the next attempt may meet a less busy machine.
            if isinstance(outcome, Grade) and outcome.verdict != "error" and self._cache_size:
                self._cache[key] = outcome.verdict == "right"
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        self._resolve(item, outcome)

    @staticmethod
    def _resolve(item: _Item, outcome: Grade | GraderError) -> None:
        while item.waiters:
            waiter = item.waiters.pop()
            # False: that caller was cancelled. The others still want the verdict.
            if waiter.set_running_or_notify_cancel():
                if isinstance(outcome, Grade):
                    waiter.set_result(outcome)
                else:
                    waiter.set_exception(outcome)

    # -- one thread a worker -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        worker: WorkerProcess | None = None
        while (item := self._queue.get()) is not None and not self._closed:
            if worker is not None and not worker.alive():  # it died idle; that is not this item's doing
                self._discard(worker)
                worker = None
            outcome: Grade | GraderError
            try:
                worker = worker or self._start()
                reply = worker.ask(item.answer, item.gold, self.timeout_s)
                if "error" in reply:
                    outcome = Grade("error", item.answer, reply["error"])
                else:
                    outcome = Grade("right" if reply["equal"] else "wrong", item.answer)
            except GraderError as e:
                outcome = e
            except (
                WorkerFault,
                OSError,
            ) as e:  # OSError: no process or descriptor left to start a worker with
                outcome = Grade("error", item.answer, str(e))
                if worker is not None:
                    self._discard(worker)
                    worker = None
            self._finish(item, outcome)
        if worker is not None:
            self._discard(worker)

    def _start(self) -> WorkerProcess:
        with self._lock:  # with the flag, so that close() never misses a worker that is being born
            if self._closed:
                raise GraderError("The grader was closed while an answer waited for its verdict.")
            warm = _WARM if self._check == DEFAULT_CHECK else []
            worker = WorkerProcess(self._check, warm, self.timeout_s)
            self._workers.add(worker)
        try:
            worker.wait_ready(_START_LIMIT_S)
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _discard(self, worker: WorkerProcess) -> None:
        worker.dispose()
        with self._lock:
            self._workers.discard(worker)


_open_graders: "weakref.WeakSet[Grader]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for grader in list(_open_graders):
        grader.close()
