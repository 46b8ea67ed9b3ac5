"""A web server as a read-only store, behind `stores.interface`."""
