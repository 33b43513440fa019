"""Does a decoder keep the target's output distribution?"""
