from setuptools import Extension, setup

setup(
    ext_modules=[
        # Optional: without a compiler, or on a processor without SHA instructions, hashing.py does the same with hashlib.
        Extension(
            "octavo.core.kv_cache._chain",
            sources=["core/kv_cache/csrc/chain.c"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
