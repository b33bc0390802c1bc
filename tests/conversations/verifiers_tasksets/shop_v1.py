"""A taskset of verifiers with a tool, which a server offers to all rollouts."""

from collections.abc import Iterator

from verifiers import v1 as vf


class Prices(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def price(self, item: str) -> str:
        """Tells the price of an item."""
        return str(10 * len(item))


class ShopTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == "50")


class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ShopTask]:
        yield ShopTask(vf.TaskData(prompt="What is an apple?", system_prompt="Be brief."), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Prices(vf.SharedToolsetConfig())]


__all__ = ["Shop"]

if __name__ == "__main__":
    Prices.run()
