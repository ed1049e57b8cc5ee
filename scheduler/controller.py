"""x"""
class Controller: pass
