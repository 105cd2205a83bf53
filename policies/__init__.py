"""Policies, profiles and the compiler that turns them into plans.  Pure: no privilege, no processes."""
