"""How fast is a worker?"""
