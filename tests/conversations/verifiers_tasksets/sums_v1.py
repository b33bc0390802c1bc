"""A taskset of verifiers: sums, answered in one turn."""

from collections.abc import Iterator

from verifiers import v1 as vf


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.total))

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(10):
            yield SumTask(SumData(prompt=f"{number} + {number}?", total=2 * number), self.config.task)


__all__ = ["Sums"]
