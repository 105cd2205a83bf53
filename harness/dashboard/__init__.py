"""The dashboard: one page that shows runs, sessions, tools and approvals."""
