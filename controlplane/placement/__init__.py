"""What runs where?"""
