"""A web server as a store to read from, behind `stores.interface`."""
