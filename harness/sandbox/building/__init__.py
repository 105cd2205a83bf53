"""Builds of images: a Dockerfile's instructions, each of which runs in a cell of the image so far."""
