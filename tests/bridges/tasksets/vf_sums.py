"""A taskset of `verifiers` as its authors would write it, with tools where its config says so."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """The sum of two whole numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTaskConfig(vf.TaskConfig):
    has_tools: bool = False
    has_error: bool = False


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        if self.config.has_error:
            raise RuntimeError("no reward today")
        return float((trace.nodes[-1].message.content or "").strip().endswith(self.data.answer))

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())] if config.has_tools else []


class SumsConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for left in range(4):
            data = SumData(prompt=f"What is {left}+3?", answer=str(left + 3))
            yield SumTask(data, self.config.task)


class LoopConfig(vf.HarnessConfig):
    pass


class Loop(vf.Harness[LoopConfig]):
    """One turn, in this process: the shipped harnesses fetch packages at their first episode."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False
    SUPPORTS_MCP = True  # so that it can be tried with tasks that have tools

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


__all__ = ["Loop", "Sums"]

if __name__ == "__main__":  # as verifiers starts the server of the tools
    Calculator.run()
