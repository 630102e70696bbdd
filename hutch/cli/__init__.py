"""The command line `hutch`: what a person or a script at a shell uses, on top of the SDK."""
