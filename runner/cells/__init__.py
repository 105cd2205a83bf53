"""One cell, as the supervisor holds it from birth to end: descriptors, output, files, network."""
