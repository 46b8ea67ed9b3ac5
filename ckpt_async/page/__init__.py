"""The live page, and the HTTP server that it shares with the metrics. It only observes.

`static/` is served as it is: HTML, CSS and JavaScript without a build step and without anything from elsewhere.
"""
