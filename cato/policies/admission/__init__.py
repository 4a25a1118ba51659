"""May an invocation join what a replica runs?"""
