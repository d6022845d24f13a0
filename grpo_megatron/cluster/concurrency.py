"""Tasks that run concurrently and end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def cancel(tasks: Iterable[asyncio.Task]) -> None:
    """Cancel tasks, unless they are being cancelled already.

    A second time would interrupt what a task does to end, such as closing an environment.
    """
    for task in tasks:
        if not task.cancelling():
            task.cancel()


async def together(coroutines: Iterable[Coroutine[Any, Any, T] | asyncio.Task[T]]) -> list[T]:
    """Run coroutines or tasks concurrently, and return their results in order.

    If one fails, the others are cancelled, and its error is raised when they have ended. asyncio.gather would
    let them run on, and nobody would know of them any more. It would also pass on a KeyboardInterrupt from
    task to task, and each of them would end the event loop's work before all tasks have ended.
    """
    tasks = [one if isinstance(one, asyncio.Task) else asyncio.create_task(one) for one in coroutines]
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        return [task.result() for task in tasks]
    except BaseException:
        cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def all_ended(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run coroutines concurrently until all have ended. If some have failed, raise the first error then."""
    for error in await asyncio.gather(*coroutines, return_exceptions=True):
        if error is not None:
            raise error
