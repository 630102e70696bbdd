from hutch import ReturnType, invoke

squares = [invoke(ReturnType(int), program="return n * n", n=n) for n in (1, 2, 3)]
print("three sandboxes answered", squares)
return sum(squares)
