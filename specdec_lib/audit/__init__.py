"""Does a decoder keep the target's law?"""
