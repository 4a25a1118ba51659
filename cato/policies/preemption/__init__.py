"""Which of the running gives way to those that wait?"""
