// A tool of an agent that runs Python in a cell of `cellwright web`; the agent's own process runs none.
import { Cellwright } from "./cellwright.ts";

const sandbox = new Cellwright({ url: process.env.CELLWRIGHT_URL!, token: process.env.CELLWRIGHT_WEB_TOKEN! });

export const pythonTool = {
  name: "python:execute",
  description: "Executes Python code in a secure sandbox.",
  parameters: {
    type: "object",
    properties: { code: { type: "string" }, requirements: { type: "array", items: { type: "string" } } },
    required: ["code"],
  },
  async execute(agent: { sessionId: string; traceId: string }, args: { code: string; requirements?: string[] }) {
    const { code, requirements: packages = [] } = args;
    const result = await sandbox.runCode({ ...agent, runtime: "python", code, packages });
    const metadata = { executionTime: result.durationMs, memoryUsage: result.memoryUsage };
    if (result.exitCode === 0) return { success: true, output: result.stdout, metadata };
    return { success: false, output: result.stderr, metadata, error: "the program failed" };
  },
};
