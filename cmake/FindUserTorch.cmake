# The torch of the interpreter that will import flatout, as the imported target `user_torch`.
#
# find_package(Torch) is not used. With a CUDA torch, it requires nvcc even for a CPU build, chooses the architectures,
# and makes everything depend on libtorch_cuda. The option `-I` makes the user's packages visible in an isolated build.
# The second try, without `-I`, finds the torch of the build environment.
set(probe [=[
import importlib.util, os, runpy
spec = importlib.util.find_spec("torch")
root = os.path.dirname(spec.origin)
print(root, runpy.run_path(os.path.join(root, "version.py"))["__version__"], sep=";", end="")
]=])
foreach(isolated "-I" "")
  execute_process(COMMAND ${Python_EXECUTABLE} ${isolated} -c "${probe}"
    OUTPUT_VARIABLE found RESULT_VARIABLE status ERROR_QUIET)
  if(status EQUAL 0)
    break()
  endif()
endforeach()
if(NOT status EQUAL 0)
  message(FATAL_ERROR "flatout builds against torch >= 2.11, and ${Python_EXECUTABLE} has none: pip install torch")
endif()
list(GET found 0 torch_root)
list(GET found 1 torch_version)
if(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "flatout needs torch >= 2.11, found torch ${torch_version} in ${torch_root}")
endif()
message(STATUS "torch ${torch_version}: ${torch_root}")

add_library(user_torch SHARED IMPORTED)
set_target_properties(user_torch PROPERTIES
  IMPORTED_LOCATION "${torch_root}/lib/libtorch_cpu.so"
  INTERFACE_INCLUDE_DIRECTORIES "${torch_root}/include")
