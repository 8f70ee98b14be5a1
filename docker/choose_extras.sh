# Write the extras for the build arguments to the file "extras". Packages that have their own container or need a
# compiler are rejected with an error.
set -eu
extras=$EXTRAS
[ "$INSTALL_BNB" = true ] && extras=$extras,quantization
[ "$INSTALL_MODELSCOPE" = true ] && extras=$extras,modelscope
refuse() { echo "$1=true: $2" >&2; exit 1; }
[ "$INSTALL_VLLM" = true ] && refuse INSTALL_VLLM "vLLM needs other versions of torch; run its own container and set infer_url=http://..."
[ "$INSTALL_DEEPSPEED" = true ] && refuse INSTALL_DEEPSPEED "build an image with FROM burnish and pip install deepspeed."
[ "$INSTALL_FLASHATTN" = true ] && refuse INSTALL_FLASHATTN "it is not needed: torch's attention is used, and nothing is compiled in this image."
echo "$extras" > extras
