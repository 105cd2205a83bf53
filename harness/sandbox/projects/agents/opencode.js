// The plugin of opencode by which each shell command runs as `cellwright exec --shell LINE`.
// An error in here, or a missing cellwright, blocks the command: opencode.json allows no other one.
const quoted = (text) => "'" + text.replaceAll("'", "'\"'\"'") + "'"

export const Cellwright = async () => ({
  "tool.execute.before": async ({ tool }, { args }) => {
    if (tool === "bash") args.command = "{cellwright} exec --shell " + quoted(args.command)
  },
})
