"""Measurement of time and memory. No other module depends on whether there is a GPU."""

import gc
import os
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from grpo_megatron.cluster.memory import anonymous_bytes


class Cuda:
    """The current GPU."""

    device = torch.device("cuda", 0)
    activity, device_type, self_time = ProfilerActivity.CUDA, DeviceType.CUDA, "self_device_time_total"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def capacity(self) -> int:
        """Return the bytes of the device's memory."""
        return torch.cuda.get_device_properties(self.device).total_memory

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def occupied(self) -> int:
        """Return the bytes in use by all processes.

        Does not create a CUDA context, which would occupy memory itself.
        """
        return torch.cuda.device_memory_used(self.device.index)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def give_back(self) -> None:
        """Free memory that only reference cycles hold, as in models, and return it to the device."""
        gc.collect()
        torch.cuda.empty_cache()

    def peak_during(self, call: Callable[[], object]) -> int:
        """Return the most bytes allocated at a time during the call, including those from before."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated()


class Cpu:
    """Replacement for a GPU in a dry run. Its figures mean nothing."""

    device = torch.device("cpu")
    activity, device_type, self_time = ProfilerActivity.CPU, DeviceType.CPU, "self_cpu_time_total"
    name = "a CPU, for a dry run"
    capacity = 2**34

    def synchronize(self) -> None:
        pass

    def occupied(self) -> int:
        return anonymous_bytes(os.getpid())

    allocated = occupied

    def give_back(self) -> None:
        gc.collect()

    def peak_during(self, call: Callable[[], object]) -> int:
        call()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


Device = Cuda | Cpu


def seconds(
    device: Device, call: Callable[[], object], repeats: int = 5, calls: int = 1, warm_up: int = 2
) -> float:
    """Return the seconds of one call, until the device has finished it.

    The result is the median of `repeats` measurements of `calls` calls each.
    """
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        device.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def slowest_operations(device: Device, call: Callable[[], object], count: int = 5) -> list[dict]:
    """Return the operations with the most device time of their own during one call.

    Each has its share of the time of all operations.
    """
    with profile(activities=[device.activity]) as found:
        call()
        device.synchronize()
    # Host events are left out, because they would count a kernel's time a second time.
    events = [event for event in found.key_averages() if event.device_type == device.device_type]
    times = {
        event.key: (getattr(event, device.self_time), event.count)
        for event in events
        if not event.is_user_annotation
    }
    total = sum(time for time, _ in times.values())
    slowest = sorted(times.items(), key=lambda item: -item[1][0])[:count]
    return [
        {"operation": name[:80], "milliseconds": time / 1e3, "calls": calls, "share": time / total}
        for name, (time, calls) in slowest
    ]
