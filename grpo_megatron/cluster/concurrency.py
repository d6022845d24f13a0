"""Tasks that run concurrently and end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def cancel(tasks: Iterable[asyncio.Task]) -> None:
    """Cancel the tasks that are not being cancelled already.

    A second cancellation would interrupt the cleanup of a task, such as closing an environment.
    """
    for task in tasks:
        if not task.cancelling():
            task.cancel()


async def together(coroutines: Iterable[Coroutine[Any, Any, T] | asyncio.Task[T]]) -> list[T]:
    """Run coroutines or tasks concurrently, and return their results in order.

    If one fails, or if this call is cancelled, all others are cancelled. The error is raised after all of
    them have ended. So no task runs on after this call, as it could after asyncio.gather.
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
    """Run coroutines concurrently, and wait until all have ended, even if some fail.

    The coroutines must return None. If some have failed, the error of the first one in order is raised.
    """
    for error in await asyncio.gather(*coroutines, return_exceptions=True):
        if error is not None:
            raise error
