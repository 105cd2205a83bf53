"""The tool `http.request`: requests that the host makes for programs, as far as rules allow them."""
