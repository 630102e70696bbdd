"""What runs inside a sandbox: supervisor, REPL, and the guest's side of `import hutch`.

Standard library only, Python 3.9 and later. `sandbox.packing` packs it as the package `hutch`;
inside, `guest.install` puts the public names here.
"""
