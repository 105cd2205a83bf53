"""Commands about stored things: trails, runs, tools, skills, packages, workspaces, servers."""
