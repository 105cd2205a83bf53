"""Cellwright over HTTP: REST with an OpenAPI document, event streams, and pages for a browser."""
