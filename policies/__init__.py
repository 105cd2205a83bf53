"""What is allowed, as data: policies, profiles, the compiler.  Pure: no privilege, no processes."""
