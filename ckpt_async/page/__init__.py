"""The live page, and the HTTP server that it has in common with the metrics. Only looks, and takes part in nothing.

`static/` is served as it is: HTML, CSS and JavaScript without a build step or anything from elsewhere.
"""
