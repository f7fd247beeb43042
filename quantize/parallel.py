"""Work in threads whose results come back in order, with few of them in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result]]:
    """Each item and its result, in order; at most two items per worker are in flight.

    The first error in the order of items is raised, whichever thread meets one first; nothing
    runs any more when the iterator ends. One worker is the caller's own thread.
    """
    if workers == 1:
        yield from ((item, function(item)) for item in items)
        return
    flying: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                flying.append((item, pool.submit(function, item)))
                if len(flying) == 2 * workers:
                    first, future = flying.popleft()
                    yield first, future.result()
            for first, future in flying:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
