"""The journal, the artifacts and the output log: everything that outlives the controller."""
