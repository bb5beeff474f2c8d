STRUCTURAL=False
def check(e):
    return []
